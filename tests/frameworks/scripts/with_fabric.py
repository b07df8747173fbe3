"""A training script as a user of Lightning Fabric writes it: ``with_fabric.py DIRECTORY``."""

import json
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def train(folder):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    losses = []
    for _ in range(2):
        for step, (batch, target) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                fabric.backward(loss)
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_gather(loss.detach()).tolist())
        fabric.barrier()
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    result = {"world size": fabric.world_size, "losses": losses, "weights": weights}
    (folder / f"training.{fabric.global_rank}.json").write_text(json.dumps(result))


def main():
    # The model goes before the group: where DDP's reducer is the last to hold a gloo group, torch
    # ends the group's thread with the interpreter's lock held, for which that thread may wait.
    train(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
