"""verl's TrainingWorker with its FSDP2 engine and its loss for supervised training."""

import os
from functools import partial
from types import SimpleNamespace

import hook_results as results
import torch
import torch.distributed as dist
import transformers
import verl
from transformers import LlamaConfig, LlamaForCausalLM
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

WORDS = 28
LENGTHS = (5, 9, 7, 6)


class Cpu(PlatformCUDA):
    """verl has no platform without an accelerator."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        **{
            **vars(torch.cuda),
            "mem_get_info": lambda *_: (0, 0),
            "current_device": lambda: "cpu",
            "set_device": lambda _: None,
        }
    )

    def set_device(self, device_index):
        pass

    def current_device(self):
        return "cpu"

    def set_allocator_settings(self, settings):
        pass


def main():
    set_platform(Cpu())  # before other modules of verl are imported: they read it then
    from verl.utils import tensordict_utils

    transformers.utils.logging.disable_progress_bar()
    folder = results.FOLDER / f"model.{os.environ['RANK']}"
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **results.SIZES)).save_pretrained(folder)
    dist.init_process_group("gloo")  # verl would ask for "cpu:gloo,cpu:nccl"
    worker = worker_of(str(folder))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(results.STEPS):
        output = worker.train_batch(batch(generator))
        metrics = tensordict_utils.get(output, "metrics")
        losses += [metrics["loss"], metrics["grad_norm"]]
    weights = [parameter.full_tensor() for parameter in worker.engine.module.parameters()]
    results.leave("verl", verl.__version__, losses, weights)


def worker_of(path):
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    monkey_patch.is_trl_available = lambda: False  # it would import a class of an older TRL
    register = EngineRegistry.register("language_model", "fsdp2", device="cpu")
    register(FSDPEngineWithLMHead)
    worker = TrainingWorker(
        config.TrainingWorkerConfig(
            model_type="language_model",
            model_config=config.HFModelConfig(
                path=path,
                load_tokenizer=False,
                use_remove_padding=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=config.FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            ),
            optimizer_config=config.FSDPOptimizerConfig(
                lr=0.01, total_training_steps=results.STEPS
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.set_loss_fn(partial(sft_loss, config=None))
    worker.reset()
    return worker


def batch(generator):
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator

    rows = []
    for length in LENGTHS:
        ids = torch.randint(0, WORDS, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.long)
        rows.append({"input_ids": ids, "position_ids": torch.arange(length), "loss_mask": mask})
    return tensordict_utils.get_tensordict(
        SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows),
        {
            "update_lr_scheduler": True,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "temperature": 1.0,
            "use_remove_padding": False,
        },
    )


if __name__ == "__main__":
    main()
