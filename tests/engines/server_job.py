"""A rank of an FSDP2 trainer whose engine is a vLLM server: rank 0 drives it by HTTP.

Run by torchrun: ``server_job.py FOLDER CASE URL``; the case is ``plain`` or ``groups``. Rank 0
prints one line of JSON: a hash of all tokens, a hash of the trained weights, and what was seen in
the rollouts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from contextlib import nullcontext
from urllib import request

import torch
import torch.distributed as dist
from hybrid_job import ITERATIONS, TOKENS, gathered, hash_of, train, trainer_of
from safetensors.torch import save_file

import reloadpg
from reloadpg.integrations import colocated
from reloadpg.integrations.vllm import Server


def posted(url, route, **body):
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    with request.urlopen(request.Request(url + route, data, headers), timeout=300) as answer:
        return json.load(answer)


def asleep(url):
    with request.urlopen(url + "/is_sleeping", timeout=60) as answer:
        return json.load(answer)["is_sleeping"]


def samples_of(url, prompt, weights):
    """Pass the weights on to the server, and generate."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, f"{folder}/model.safetensors")
        posted(url, "/collective_rpc", method="reload_weights", kwargs={"weights_path": folder})
    asked = {"prompt": [prompt] * 2, "max_tokens": TOKENS, "temperature": 0}
    answer = posted(url, "/v1/completions", **asked, ignore_eos=True, return_token_ids=True)
    return [one["token_ids"] for one in answer["choices"]]


def main(folder, case, url):
    if case != "plain":
        reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = trainer_of(folder, dist.get_world_size())
    engine = Server(url) if rank == 0 and case != "plain" else None
    rollout = nullcontext() if case == "plain" else colocated(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens, seen = hashlib.sha256(), []
    if engine:
        engine.sleep()
    for step in range(ITERATIONS):
        weights, samples = gathered(model), [None]
        if rank == 0:
            seen.append(asleep(url))
        with rollout:
            if rank == 0:
                seen += [asleep(url), reloadpg.status().state]
                samples = [samples_of(url, [5 + step, 6, 7, 8], weights)]
        dist.broadcast_object_list(samples)
        tokens.update(json.dumps(samples[0]).encode())
        train(model, optimizer, samples[0])
    result = {"tokens": tokens.hexdigest(), "weights": hash_of(gathered(model)), "seen": seen}
    with rollout:
        if engine:
            engine.sleep()
            result["awake"] = [engine.wake_up([tag]) for tag in ("weights", "kv_cache")]
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
