"""torchtitan's Trainer: Llama 3, FSDP2 and tensor parallelism. ``with_torchtitan.py DIRECTORY``"""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule

VOCABULARY = 64
LENGTH = 16


def no_accelerator():
    """Let torchtitan use the CPU; it asks torch for the accelerator when it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = SimpleNamespace(total_memory=1 << 30)
    none = {"reset_peak_memory_stats": 0, "empty_cache": 0, "memory_stats": {}}
    none |= {"current_device": 0, "get_device_name": "CPU", "get_device_properties": properties}
    for name, value in none.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)


class Tokens(torch.utils.data.IterableDataset):
    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self):
        while True:
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=self.generator)
            yield {"input": tokens[:-1]}, tokens[1:]


def main(folder):
    no_accelerator()
    from torchtitan import train
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    def loader(dp_rank, dp_world_size, job_config, **_):
        size = job_config.training.local_batch_size
        return ParallelAwareDataloader(Tokens(dp_rank), dp_rank, dp_world_size, batch_size=size)

    small = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY)
    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"small": small},
        build_tokenizer_fn=None,
        build_dataloader_fn=loader,
        state_dict_adapter=None,
    )
    register_train_spec("of the test", spec)
    job = JobConfig()
    job.job.dump_folder = str(folder)
    job.model.name, job.model.flavor = "of the test", "small"
    job.training.steps, job.training.local_batch_size, job.training.seq_len = 8, 2, LENGTH
    job.parallelism.tensor_parallel_degree = 2
    job.optimizer.implementation = "for-loop"
    job.lr_scheduler.warmup_steps = 2
    job.metrics.log_freq = 1
    job.debug.seed = 7
    trainer = train.Trainer(job)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    losses = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda *facts, **more: (
        losses.append(facts),
        log(*facts, **more),
    )
    trainer.train()
    weights = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    rank = torch.distributed.get_rank()
    trainer.close()
    torch.distributed.destroy_process_group()
    (folder / f"training.{rank}.json").write_text(json.dumps([losses, weights]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
