"""A rank of TRL's GRPOTrainer with its own vLLM in the trainer's processes.

Run by torchrun: ``trl_job.py FOLDER CASE PARALLEL``. The case is ``plain``, ``hook`` or ``sleep``
(the hook, with the engine's sleep mode). Each rank prints a line of JSON: the losses, a hash of the
trained weights, and the states of the sets in each call of the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRL_EXPERIMENTAL_SILENCE="1",
)

import torch.distributed as dist
import trl
import vllm
from datasets import Dataset
from transformers import AutoTokenizer
from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers import utils

import reloadpg
from reloadpg.integrations import colocated
from reloadpg.integrations.trl import offloaded_generation

STEPS = 3

# Otherwise tensor parallelism on the CPU uses shared memory, and no group.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
# Otherwise the weights are packed, and TRL cannot load new ones.
_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


def noted(llm, calls):
    """Record the states of the sets whenever TRL calls the engine."""

    def watched(name, own):
        def call(*args, **kwargs):
            sets = reloadpg.status().sets
            tags = kwargs.get("tags")
            calls.append([name, tags, {n: one.state for n, one in sets.items()}])
            return own(*args, **kwargs)

        return call

    for name in ("wake_up", "generate", "sleep"):
        setattr(llm, name, watched(name, getattr(llm, name)))


def main(folder, case, parallel):
    if case != "plain":
        reloadpg.install(backends={"gloo"}, sets={"engine": "vllm.*"})
    prompts = [{"prompt": text} for text in ("the groups", "take turns", "on one", "device")] * 4
    trainer = trl.GRPOTrainer(
        folder,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_tensor_parallel_size=parallel,
            vllm_max_model_length=64,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    generation, calls = trainer.vllm_generation, []
    if case == "sleep":  # vLLM refuses the option on CPUs; its calls, tags and scheduler are there
        generation.enable_sleep_mode = True
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True
    noted(generation.llm, calls)
    if case != "plain":
        block = colocated(engine_groups="engine")
        handle = offloaded_generation(trainer, block=block)
    trainer.train()
    names = ("loss", "reward", "grad_norm", "entropy")
    logged = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    trained = hashlib.sha256()
    for one in trainer.model.parameters():
        trained.update(one.detach().numpy().tobytes())
    result = {
        "rank": dist.get_rank(),
        "losses": logged,
        "weights": trained.hexdigest(),
        "calls": calls,
        "cycles": 0 if case == "plain" else handle.cycles,
        "sets": sorted({one.set for one in reloadpg.status().groups}),
        "versions": [trl.__version__, vllm.__version__],
    }
    if case != "plain":
        reloadpg.reload()
    # One write, as all ranks have one pipe, and with -u print() writes the newline separately.
    print(f"RESULT {json.dumps(result)}\n", end="", flush=True)
    dist.barrier()
    os._exit(0)  # vLLM's own end destroys every group of the process


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
