"""A small GPT trained by megatron-core's own model, schedule, gradient buffers and optimizer.

megatron-core (0.16.1) needs CUDA. :func:`cuda_on_cpu` replaces the calls of CUDA by CPU ones;
everything else is megatron-core's: the layers, the 1F1B pipeline schedule, the
point-to-point and tensor-parallel communication, the tied embedding, the gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

MICROBATCHES, MICROBATCH, LENGTH, VOCABULARY = 4, 2, 8, 32

PRELOAD = ("megatron.core.models.gpt", "megatron.core.optimizer")
"""The slowest modules to import, for ``run_ranks``."""


class _FactoriesOnCpu(TorchFunctionMode):
    """Factories such as ``torch.zeros(..., device="cuda")`` create CPU tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Replace what megatron-core uses of CUDA in a training step.

    - ``device="cuda"`` in factories: the schedule's token count, the optimizer's scale, the norm;
    - ``torch.cuda.current_device()``: buffers for gradients and for received activations;
    - ``Tensor.cuda()``: the tied embedding's first exchange;
    - the state of the CUDA random generator, which its tracker of parallel dropout saves and sets.
    """
    from megatron.core.tensor_parallel import random as tracker

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "get_rng_state", get_state),
            (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
            (tracker, "_get_cuda_rng_state", get_state),
            (tracker, "_set_cuda_rng_state", set_state),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_FactoriesOnCpu())
        yield


def microbatches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count modulo the vocabulary from a random start."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        start = torch.randint(VOCABULARY, (MICROBATCH, 1), generator=generator)
        counted = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        yield {
            "input_ids": counted[:, :-1],
            "labels": counted[:, 1:].contiguous(),
            "position_ids": torch.arange(LENGTH).expand(MICROBATCH, -1),
            "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5,
        }


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(**next(batches)), loss_of


class GptTraining:
    """One of four ranks in training, tensor 2 x pipeline 2; the default group exists."""

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.manual_seed(1234)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2
        )
        model_parallel_cuda_manual_seed(1234)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            ffn_hidden_size=32,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            batch_p2p_sync=False,  # a wait for the CUDA device
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            finalize_model_grads_func=finalize_model_grads,
        )
        self.gpt = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), self.gpt)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=0.02, clip_grad=0.0), [self.model]
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = get_forward_backward_func()
        self.groups = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        }

    def step(self, number: int) -> tuple[list[float], float]:
        """Run one step; return the losses of its microbatches (last stage only) and the norm."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self.schedule(
            forward_step_func=forward_step,
            data_iterator=microbatches(number),
            model=[self.model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        norm = float(self.optimizer.get_grad_norm())
        self.optimizer.step()
        return [output["loss"].item() for output in outputs], norm

    def weights(self) -> dict[str, Any]:
        return {name: weight.tolist() for name, weight in self.gpt.named_parameters()}

    def end(self) -> None:
        """Destroy Megatron's groups and all others."""
        from megatron.core import parallel_state

        del self.model, self.optimizer, self.gpt, self.schedule
        self.groups.clear()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
