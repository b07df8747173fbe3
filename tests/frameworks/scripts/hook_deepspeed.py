"""DeepSpeed's engine (ZeRO 1, 2 and 3), and the block of ``reloadpg.integrations.deepspeed``."""

import deepspeed
import hook_results as results
import torch
import torch.distributed as dist


def main():
    deepspeed.init_distributed("gloo")
    losses, weights = [], []
    for stage in (1, 2, 3):
        losses += train(stage, weights)
    results.leave("deepspeed", deepspeed.__version__, losses, weights)


def train(stage, weights):
    torch.manual_seed(7 + stage)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config={
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": True,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 200,
            },
        },
    )
    generator = torch.Generator().manual_seed(10 * stage + dist.get_rank())
    losses = []
    for step in range(results.STEPS):
        batch = torch.randn(4, 8, generator=generator)
        loss = (engine(batch) - batch.sum(1, keepdim=True).tanh()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 3 and stage == 3:
            prefetch(engine)
            assert "INFLIGHT" in states(model), states(model)
        if results.HOOK and step % results.EVERY:
            from reloadpg.integrations.deepspeed import offloaded

            with offloaded(engine):
                assert states(model) <= {"", "NOT_AVAILABLE"}, states(model)
                results.phase()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        weights += [parameter.detach().clone() for parameter in model.parameters()]
    return losses


def states(model):
    """Where the parameters are, as ZeRO-3 has it; empty strings in other stages."""
    return {getattr(getattr(p, "ds_status", None), "name", "") for p in model.parameters()}


def prefetch(engine):
    """Leave a gather in flight: a forward pass that an exception ends after its first layer."""

    def stop(*_):
        raise KeyError("on purpose")

    handle = engine.module[1].register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            engine(torch.ones(4, 8))
    except KeyError:
        pass
    handle.remove()


if __name__ == "__main__":
    main()
