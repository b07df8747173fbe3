"""Lightning's Trainer (DDP), and the callback of ``reloadpg.integrations.lightning``."""

import hook_results as results
import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        self.losses = []

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("validation", loss, sync_dist=True)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.losses.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def main():
    lightning.seed_everything(7, verbose=False)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    callbacks = []
    if results.HOOK:
        from reloadpg.integrations.lightning import offloaded_phase

        callbacks = [
            offloaded_phase(results.phase, when="train_batch_end", every=4),
            offloaded_phase(results.phase, when="validation_end"),
        ]
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(results.FOLDER),
    )
    train = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(module, train, DataLoader(data, batch_size=16))
    results.leave("lightning", lightning.__version__, module.losses, module.parameters())


if __name__ == "__main__":
    main()
