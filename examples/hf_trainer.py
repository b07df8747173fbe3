"""Hugging Face's Trainer under torchrun, with its groups released while the model generates::

    torchrun --nproc-per-node 2 examples/hf_trainer.py

A callback offloads the groups after each step, lets this rank's own copy of the model write the
sequences of the next steps, and reloads. Trainer, accelerate and DDP keep the groups that they were
given; ``install`` runs before ``TrainingArguments``, which creates the default group.

On GPUs: leave ``use_cpu`` and ``ddp_backend`` out; the groups are then NCCL's. The callback is the
place to wake a rollout engine on the memory that the groups gave back, and to put it to sleep
before the reload. With FSDP no rank has a whole model: copy the weights to the engine first.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import reloadpg

GPU = torch.cuda.is_available()
STEPS, BATCH, SEQUENCES, LENGTH, VOCABULARY = 3, 4, 16, 12, 32


class Sequences(Dataset[dict[str, Tensor]]):
    """The sequences to train on: the same object throughout, refilled by each rollout."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (SEQUENCES, LENGTH)
        self.tokens = torch.randint(1, VOCABULARY, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Rollout(TrainerCallback):  # type: ignore[misc]
    """Generates after each step, while the groups own no communicators."""

    def __init__(self, data: Sequences) -> None:
        self.data = data

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        loss = given["logs"].get("loss")
        if loss is not None and state.is_world_process_zero:
            status = reloadpg.status()
            print(
                f"step {state.global_step}: loss {loss:.6f}, generation {status.generation}, "
                f"reloadable groups: {len(status.groups)}",
                flush=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        model = getattr(model, "module", model)  # this rank's copy, without DDP around it
        prompts = self.data.tokens[:, :4].to(model.device)
        torch.manual_seed(1000 * state.global_step + dist.get_rank())
        with reloadpg.offloaded():  # all ranks; reloaded at the end of the block
            model.eval()
            with torch.no_grad():
                written = model.generate(
                    prompts, max_length=LENGTH, min_length=LENGTH, do_sample=True, pad_token_id=0
                )
            model.train()
        self.data.tokens = written.cpu()


def main() -> None:
    reloadpg.install(backends=None if GPU else {"gloo"})  # before the groups are created
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            **({} if GPU else {"use_cpu": True, "ddp_backend": "gloo"}),
        )
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
        data = Sequences()
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[Rollout(data)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
