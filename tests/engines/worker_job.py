"""vLLM with workers in separate processes (``mp``): offloaded while the engine sleeps.

Run as ``worker_job.py FOLDER CASE``; the case is ``plain`` or ``groups``. Prints a line of JSON:
the tokens of three generations, and what the workers' reports say.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # collective_rpc() of a function
    HF_HUB_OFFLINE="1",
)


def through_groups(worker):
    """Let tensor parallelism use torch's groups; on the CPU it uses shared memory by default."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    get_tp_group().device_communicator.dist_module = dist


def state(worker):
    import reloadpg

    return reloadpg.status().state


def main(folder, case):
    if case != "plain":
        os.environ.update(RELOADPG_AUTOINSTALL="1", RELOADPG_BACKENDS="gloo")
    from vllm import LLM, SamplingParams

    from reloadpg.integrations.vllm import WorkerGroups

    llm = LLM(
        folder,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        seed=0,
    )
    llm.collective_rpc(through_groups)
    engine = llm if case == "plain" else WorkerGroups(llm)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens, reports, states = [], [], []
    for step in range(3):
        report = engine.sleep(level=1)
        if case != "plain":
            reports.append([one["offload/groups"] for one in report])
            states.append(llm.collective_rpc(state))
        assert engine.wake_up() is True
        if case != "plain":
            states.append(llm.collective_rpc(state))
        prompt = {"prompt_token_ids": [5 + step, 6, 7, 8]}
        [output] = llm.generate([prompt], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    print("RESULT " + json.dumps({"tokens": tokens, "reports": reports, "states": states}))


if __name__ == "__main__":
    main(*sys.argv[1:])
