"""A small residual network that tells discs from squares: the same script on all the devices it is given."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

import stormo


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return relu(x + self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))


def drawings(count):
    """Noisy drawings of 12 × 12 pixels, half of them discs (0) and half squares (1)."""
    labels = torch.randint(2, (count,))
    centres = 4 + 4 * torch.rand(count, 2, 1, 1)
    grid = torch.arange(12.0)
    down, across = (grid.view(1, 12, 1) - centres[:, 0]).abs(), (grid.view(1, 1, 12) - centres[:, 1]).abs()
    discs, squares = (down**2 + across**2).sqrt() < 3, torch.maximum(down, across) < 2.7
    shapes = torch.where(labels.view(-1, 1, 1) == 0, discs, squares).float()
    return TensorDataset((shapes + 0.3 * torch.randn(count, 12, 12)).unsqueeze(1), labels)


world = stormo.World()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = drawings(308)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), Block(8), nn.MaxPool2d(2), Block(8), nn.Flatten(), nn.Linear(8 * 36, 2)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * 10)
loader = world.loader(DataLoader(data, batch_size=32, shuffle=True))
model, optimizer, scheduler = world.wrap(model, optimizer, scheduler)
for epoch in range(3):
    loss_sum = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
        scheduler.step()
        loss_sum += loss.item() * len(labels)
    world.print(f"epoch {epoch}: loss {world.sum(loss_sum) / len(data):.5f}")
