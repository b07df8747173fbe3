"""A training script as a user of accelerate writes it: ``with_accelerate.py DIRECTORY``."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses = []
    for _ in range(2):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist())
        accelerator.wait_for_everyone()
    weights = [p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
    result = {"world size": accelerator.num_processes, "losses": losses, "weights": weights}
    path = Path(sys.argv[1]) / f"training.{accelerator.process_index}.json"
    path.write_text(json.dumps(result))
    # The model goes before the group: where DDP's reducer is the last to hold a gloo group, torch
    # ends the group's thread with the interpreter's lock held, for which that thread may wait.
    model, optimizer, scheduler, loader = accelerator.free_memory(
        model, optimizer, scheduler, loader
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
