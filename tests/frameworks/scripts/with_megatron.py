"""megatron-core trains a small GPT, tensor 2 x pipeline 2: ``with_megatron.py DIRECTORY``.

What of CUDA is answered by the CPU is in ``gpt_job``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpt_job import GptTraining, cuda_on_cpu


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with cuda_on_cpu():
        training = GptTraining()
        steps = [training.step(number) for number in range(8)]
        result = {"losses": steps, "weights": training.weights()}
        training.end()
    (Path(sys.argv[1]) / f"training.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
