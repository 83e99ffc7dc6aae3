"""The GPT of `gpt.py` in a loop of one's own: it saves, resumes where it was stopped, and writes some text.

python examples/gpt_world.py                                      # one process
stormo run examples/gpt_world.py --num-gpus 2 -- --epochs 4       # two: the same numbers, to rounding
"""

import argparse

import torch
from gpt import GPT, next_byte_loss, read_windows

import stormo

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="files to read, such as 'books/*.txt'")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--block", type=int, default=64)
parser.add_argument("--num-bytes", type=int, default=300_000)
parser.add_argument("--batch", type=int, default=64, help="windows of a step, on all workers together")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--folder", default="gpt-checkpoints")
args = parser.parse_args()

world = stormo.World()
torch.manual_seed(0)
train, validation = read_windows(args.text, args.block, args.num_bytes)
model = GPT(args.width, args.depth, args.block)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
loader = world.loader(train, global_batch_size=args.batch, shuffle=True)
checks = world.loader(validation, global_batch_size=args.batch)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1))  # a warm-up
model, optimizer, scheduler = world.wrap(model, optimizer, scheduler)

state = world.load(args.folder)  # {} if there is none yet
for epoch in range(state.get("epoch", 1), args.epochs + 1):
    for windows in loader:
        world.backward(next_byte_loss(model, windows))
        world.clip_grad_norm(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if world.stop_requested:
            world.save(args.folder, epoch=epoch)
            raise SystemExit(world.exit_code)
    with torch.no_grad():
        loss = world.sum(sum(float(next_byte_loss(model, windows)) * len(windows) for windows in checks))
    world.print(f"epoch {epoch}: validation loss {loss / len(validation):.4f}")
    world.save(args.folder, epoch=epoch + 1)

if world.is_main:
    text = torch.tensor([list(b"def ")], device=world.device)
    with torch.no_grad():
        for _ in range(args.block - text.shape[1]):
            scores = model(text)[:, -1]
            text = torch.cat([text, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
    print(bytes(text[0].tolist()).decode(errors="replace"))
