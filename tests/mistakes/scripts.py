"""Mistakes in scripts with a training loop of their own, and what `stormo.World` says of them."""

from __future__ import annotations

from tests.mistakes.mistake import Mistake

GOOD_SCRIPT = """\
import stormo
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = stormo.World()
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = world.wrap(model, optimizer)
loader = world.loader(DataLoader(data, batch_size=16, shuffle=True))
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    world.backward(loss)
    optimizer.step()
total = world.sum(loss.item())
"""
_BACKWARD = "    world.backward(loss)\n"
_STEP = "    optimizer.step()\n"
_WRAP = "model, optimizer = world.wrap(model, optimizer)\n"
_TOGETHER = (
    "so neither can complete; let all workers make the same calls in the same order: decide with world.any(...) or "
    "world.stop_requested, and keep collective calls out of branches that only some workers enter."
)


def _script(name: str, change: tuple[str, str], says: str, num_workers: int = 1) -> Mistake:
    words = {"verb": "run", "good": GOOD_SCRIPT, "file": "my_script.py"}
    return Mistake(name=name, change=change, says=says, num_workers=num_workers, **words)  # type: ignore[arg-type]


_LOADER = "loader = world.loader(DataLoader(data, batch_size=16, shuffle=True))\n"

IN_A_SCRIPT = [
    _script(
        "`loss.backward()` instead of `world.backward(loss)`",
        (_BACKWARD, "    loss.backward()\n"),
        "optimizer.step() was called without world.backward() before it, but loss.backward() gives every worker "
        "its own gradient; call world.backward(loss) instead of loss.backward().",
    ),
    _script(
        "`world.backward()` twice for one batch of `accumulate=2`",
        (
            "shuffle=True))",
            "shuffle=True), accumulate=2)\nworld.backward = lambda loss, once=world.backward: "
            "(once(loss, retain_graph=True), once(loss))",
        ),
        "world.backward() was called twice for one batch with accumulate above 1, but the gradients of several "
        "losses would be mixed up; set more=True for all but the last loss of a batch, or leave accumulate out.",
    ),
    _script(
        "`more=True` for the last loss of a step",
        (_BACKWARD, "    world.backward(loss, more=True)\n"),
        "optimizer.step() was called after world.backward(loss, more=True), but more=True says that another backward "
        "follows before the step; leave it out of the last backward before a step.",
    ),
    _script(
        "a loss for each sample",
        ("model(x), y)", "model(x), y, reduction='none')"),
        "world.backward() was given a tensor of shape [16], but the loss is one number that depends on the wrapped "
        "model; pass the mean over this worker's samples, such as loss.mean().",
    ),
    _script(
        "a batch that came from elsewhere",
        ("for x, y in loader:", "for x, y in DataLoader(data, batch_size=16):"),
        "world.backward() was called outside of a loop over a loader of world.loader(), but the weight of this "
        "worker's loss is unknown; take the batch from such a loader, or set count= to what the loss is a mean "
        "over.",
    ),
    _script(
        "a `DistributedSampler`",
        (
            "batch_size=16, shuffle=True",
            "batch_size=16, sampler=torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)",
        ),
        "world.loader() was given a DataLoader with a DistributedSampler, but it has cut the data already, and drops "
        "or repeats some; leave the sampler out (shuffle=True does the same).",
    ),
    _script(
        "the optimizer of another model",
        ("optim.SGD(model.parameters()", "optim.SGD(nn.Linear(8, 3).parameters()"),
        "world.wrap() was given an optimizer with 2 tensors not of the model, but their gradients would differ "
        "between the workers; make the optimizer from model.parameters(), and pass all models it moves in one "
        "call.",
    ),
    _script(
        "two worlds",
        ("world = stormo.World()\n", "world = stormo.World()\nother = stormo.World()\n"),
        "stormo.World() was called a second time, but a process is one worker; use the first one.",
    ),
    _script(
        "`world.load()` before `world.wrap()`",
        (_WRAP, "first = world.wrap(nn.Linear(8, 3))\nworld.save('saved')\n" + _WRAP + "world.load('saved')\n"),
        "world.load() was called when the script had 2 calls of world.wrap(), but saved/step-00000000 holds 1; call it "
        "after every world.wrap() and world.loader(), in a script that makes the same ones.",
    ),
    _script(
        "`world.save()` before `optimizer.step()`",
        (_STEP, "    world.save('saved')\n" + _STEP),
        "world.save() was called between world.backward() and optimizer.step(), but a checkpoint holds no gradients, "
        "and that batch would be lost; call it after optimizer.step(), or after optimizer.zero_grad() if no step "
        "follows.",
    ),
    _script(
        "a second optimizer that is not wrapped, with `accumulate=2`",
        (
            _LOADER,
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            + _LOADER.replace("True))", "True), accumulate=2)"),
        ),
        "the weights or gradients were changed between the micro-batches of a step, but the gradients are not complete "
        "there; pass every optimizer and loss scaler to world.wrap(), and clip with world.clip_grad_norm(...).",
    ),
    _script(
        "a model in a `DataParallel` or `DistributedDataParallel`",
        (_WRAP, "model = nn.DataParallel(model)\n" + _WRAP),
        "world.wrap() was given a DataParallel, but it sums the gradients itself; pass the model without it.",
    ),
]

IN_A_SCRIPT_ON_TWO_WORKERS = [
    _script(
        "`break` on one worker",
        (_STEP, _STEP + "    if world.is_main:\n        break\n"),
        "rank 0 is at: world.sum of a number in my_script.py line 19, but rank 1 is at: world.backward in my_script.py "
        "line 15, over 2 parameters (26d1effe), " + _TOGETHER,
        2,
    ),
    _script(
        "`continue` on one worker",
        (_BACKWARD, "    if world.is_main:\n        continue\n" + _BACKWARD),
        "rank 0 is at: the batch at sample 16 of epoch 1 of loader 1 in my_script.py line 12, but rank 1 is at: "
        "world.backward in my_script.py line 17, over 2 parameters (26d1effe), " + _TOGETHER,
        2,
    ),
    _script(
        "`world.sum()` on rank 0 only",
        ("for x, y in loader:", "if world.is_main:\n    world.sum(1)\nfor x, y in loader:"),
        "rank 0 is at: world.sum of a number in my_script.py line 13, but rank 1 is at: the start of epoch 1 of loader "
        "1 in my_script.py line 14, " + _TOGETHER,
        2,
    ),
    _script(
        "a metric that one worker does not have",
        ("world.sum(loss.item())", "world.sum({'loss': 1.0} if world.is_main else {})"),
        "rank 0 is at: world.sum of {'loss': a number} in my_script.py line 17, but rank 1 is at: world.sum of {} in "
        "my_script.py line 17, " + _TOGETHER,
        2,
    ),
    _script(
        "`loss.backward()` for one of two losses",
        (_BACKWARD, "    (loss / 2).backward(retain_graph=True)\n    world.backward(loss / 2)\n"),
        "world.backward() was called on top of gradients that did not come from it, but loss.backward() gives every "
        "worker its own gradient, which the sum would count once a worker; call world.backward() for every loss, "
        "or optimizer.zero_grad() before it.",
        2,
    ),
    _script(
        "weights loaded or drawn on one worker",
        (_LOADER, _LOADER + "if world.is_main:\n    nn.init.ones_(model.weight)\n"),
        "parameter weight differs between rank 0 and rank 1, but every worker trains a replica of one model; call "
        "world.backward(loss) instead of loss.backward(), and let all workers load or draw the same weights and "
        "optimizer state, or do it before world.wrap().",
        2,
    ),
    _script(
        "a rate that follows the worker's own loss",
        (_LOADER, _LOADER + "optimizer.param_groups[0]['lr'] /= 1 + world.rank\n"),
        "the learning rate of optimizer 1, group 1 is 0.1 on rank 0, but it is 0.05 on rank 1, so their weights would "
        "differ; compute it from world.sum() of a metric, and pass the scheduler to world.wrap().",
        2,
    ),
    _script(
        "a sum as loss",
        ("model(x), y)", "model(x), y, reduction='sum')"),
        "world.backward() in my_script.py line 15 was given a loss that is, or contains, a sum over the batch, but it "
        "would be taken for a mean, so that steps shrink with the number of workers and micro-batches; set "
        'reduction="sum" (in a separate call if other parts are means), or count= to what divides it.',
        2,
    ),
    _script(
        "a stream that each worker reads a part of",
        (_LOADER, "loader = world.loader((data[n] for n in range(world.rank, 64, 2)), batch_size=8)\n"),
        "the stream passed to world.loader() starts with different batches on rank 0 and rank 1, but each worker "
        "reads the whole stream and takes its share of every batch; let it not depend on the worker, or say "
        "sharded=True if every worker has its own part.",
        2,
    ),
]

# The headings of the page.
SCRIPT_KINDS = {
    "In a script with its own loop": IN_A_SCRIPT,
    "In a script on several workers": IN_A_SCRIPT_ON_TWO_WORKERS,
}
