"""A regression on a stream of sensor readings that come as dicts: the same script on all the devices it is given."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

import stormo


class Readings(IterableDataset):
    """403 readings that can only be read one after the other."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(403):
            place = torch.rand(3, generator=generator)
            noise = 0.05 * torch.randn(1, generator=generator)
            yield {"sensor": {"place": place}, "value": place.prod() + place.sum().sin() + noise}


world = stormo.World()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = world.loader(DataLoader(Readings(), batch_size=32))
model, optimizer = world.wrap(model, optimizer)
for epoch in range(4):
    error_sum = 0.0
    for batch in loader:
        values = batch["value"].to(device)
        loss = mse_loss(model(batch["sensor"]["place"].to(device)), values)
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
        error_sum += loss.item() * len(values)
    world.print(f"epoch {epoch}: mean squared error {world.sum(error_sum) / 403:.6f}")
