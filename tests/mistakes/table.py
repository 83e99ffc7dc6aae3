"""The table of mistakes; one list for each kind of file a user writes."""

from __future__ import annotations

from tests.mistakes.mistake import GOOD_TASK, Mistake

_TWO_LAYERS = GOOD_TASK.replace(
    "class Net",
    """\
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)

class Net""",
)
_CLASS = "class Net(stormo.Task):\n"
_LOSS = "        return nn.functional.cross_entropy(model(x), y)\n"
_MODEL = "        return nn.Linear(8, 3)\n"
_TRAIN_DATA = "        return TensorData(torch.randn(64, 8), torch.randint(3, (64,)))\n"
_VALIDATION_DATA = "        return self.train_data()\n"
_OPTIONS = "    @dataclasses.dataclass\n    class Options:\n"


def _loss(code: str) -> tuple[str, str]:
    return _LOSS, code


IN_THE_CLASS = [
    Mistake(
        name="no `loss()`",
        change=("def loss", "def compute_loss"),
        before_workers=True,
        says="class Net was named as the task, but it has no loss(); write def loss(self, model, batch).",
    ),
    Mistake(
        name="misspelt `validation_data()`, no `train_data()`",
        change=(
            "    def train_data(self):\n" + _TRAIN_DATA + "\n    def validation_data(self):\n" + _VALIDATION_DATA,
            "    def validate_data(self):\n        return [(torch.ones(8), 1)]\n",
        ),
        before_workers=True,
        says=(
            "class Net was named as the task, but it has no train_data() and no validation_data(); write "
            "def train_data(self) and def validation_data(self)."
        ),
    ),
    Mistake(
        name="`loss()` without `model`",
        change=("def loss(self, model, batch)", "def loss(self, batch)"),
        before_workers=True,
        says=(
            "Net.loss(self, batch) was written, but it is called as loss(model, batch); write def "
            "loss(self, model, batch)."
        ),
    ),
    Mistake(
        name="`model` is an object, not a method",
        change=("    def model(self):\n" + _MODEL, "    model = nn.Linear(8, 3)\n"),
        before_workers=True,
        says=("Net.model is a Linear, but it is called as model(), so it must be a method; write def model(self)."),
    ),
    Mistake(
        name="`__init__()` without that of `Task`",
        change=(_CLASS, _CLASS + "    def __init__(self, options):\n        self.width = 3\n\n"),
        before_workers=True,
        says=(
            "Net.__init__() was written, but it does not call that of stormo.Task, which keeps the options; "
            "begin it with super().__init__(options)."
        ),
    ),
    Mistake(
        name="`__init__()` that takes no options",
        change=(_CLASS, _CLASS + "    def __init__(self):\n        super().__init__(None)\n\n"),
        before_workers=True,
        says=(
            "Net.__init__(self) was written, but it is called as __init__(options); write def __init__(self, options)."
        ),
    ),
    Mistake(
        name="`Options` that is no dataclass",
        change=(_CLASS, _CLASS + "    class Options:\n        width: int = 3\n\n"),
        before_workers=True,
        says="Net.Options was written, but it is not a dataclass; put @dataclass above class Options.",
    ),
    Mistake(
        name="an option without a default",
        change=(_CLASS, _CLASS + _OPTIONS + "        width: int\n\n"),
        before_workers=True,
        says=(
            "option width of Net.Options has no default, but a run must be able to start without it; give "
            "it one, as in width: int = …."
        ),
    ),
    Mistake(
        name="an option of another type",
        change=(_CLASS, _CLASS + _OPTIONS + "        widths: tuple[int, ...] = (3, 4)\n\n"),
        before_workers=True,
        says=(
            "option widths of section task is declared as tuple[int, ...], but an option is int, float, "
            "str, bool, one of those or None, a Literal of strings, or a number or a Literal; declare it as "
            "one of these."
        ),
    ),
    Mistake(
        name="`num_draws` that is no number",
        change=(_CLASS, _CLASS + '    num_draws = "two"\n\n'),
        before_workers=True,
        says=(
            "Net.num_draws is 'two', but it counts the random numbers that augment() gets for each sample; "
            "set a whole number from 0."
        ),
    ),
    Mistake(
        name="a `loss_reduction` that is none",
        change=(_CLASS, _CLASS + '    loss_reduction = "median"\n\n'),
        before_workers=True,
        says=(
            "Net.loss_reduction is 'median', but it says what loss() is over the samples of a batch; "
            'set it to "mean", "sum" or "local".'
        ),
    ),
    Mistake(
        name="a class that is no `stormo.Task`",
        change=("(stormo.Task)", ""),
        before_workers=True,
        says=(
            "the task my_task.py was named, but it defines no subclass of stormo.Task; write class "
            "MyTask(stormo.Task) in it; stormo new FILE.py writes an example."
        ),
    ),
    Mistake(
        name="a file without a task",
        change=(GOOD_TASK, "width = 3\n"),
        before_workers=True,
        says=(
            "the task my_task.py was named, but it defines no subclass of stormo.Task; write class "
            "MyTask(stormo.Task) in it; stormo new FILE.py writes an example."
        ),
    ),
    Mistake(
        name="a syntax error",
        change=("def model(self):", "def model(self)"),
        before_workers=True,
        says=(
            "the task my_task.py was named, but line 8 of my_task.py raised SyntaxError: expected ':'; fix "
            "that line.\n"
            '  File "{folder}/my_task.py", line 8\n'
            "    def model(self)\n"
            "                   ^\n"
            "SyntaxError: expected ':'"
        ),
    ),
    Mistake(
        name="a script that ends its process",
        change=("import stormo\n", "import stormo\nimport sys\nsys.exit()\n"),
        before_workers=True,
        says=(
            "the task my_task.py was named, but line 5 of my_task.py ends the process when it is imported; put what "
            'only a script does under if __name__ == "__main__":.'
        ),
    ),
    Mistake(
        name="a package that is not installed",
        change=("import stormo\n", "import stormo\nimport a_package_of_another_machine\n"),
        before_workers=True,
        says=(
            "the task my_task.py was named, but line 4 of my_task.py raised ModuleNotFoundError: No module "
            "named 'a_package_of_another_machine'; install that package, or set PYTHONPATH to its folder.\n"
            "Traceback (most recent call last):\n"
            '  File "{folder}/my_task.py", line 4, in <module>\n'
            "    import a_package_of_another_machine\n"
            "ModuleNotFoundError: No module named 'a_package_of_another_machine'"
        ),
    ),
    Mistake(
        name="a file called like a module",
        change=("width", "width"),
        good="width = 3\n",
        file="random.py",
        before_workers=True,
        says=("the task random.py was named, but random is also the name of a module it would hide; rename the file."),
    ),
    Mistake(
        name="fewer samples than workers, told by `facts()`",
        change=(
            _CLASS,
            "from stormo.config.plan import Facts\n\n"
            + _CLASS
            + "    def facts(self):\n        return Facts(num_train=2, num_validation=64)\n\n",
        ),
        num_workers=3,
        before_workers=True,
        says=(
            "3 workers were asked for, but the training set has 2 samples, fewer than one for each; set "
            "--num-gpus for at most 2 workers."
        ),
    ),
]

IN_THE_FIRST_BATCH = [
    Mistake(
        name="`model()` without `return`",
        change=(_MODEL, _MODEL.replace("return ", "")),
        says="Net.model() returned None, but an nn.Module is trained; end it with return and the module.",
    ),
    Mistake(
        name="`model()` returns a class",
        change=(_MODEL, "        return nn.Linear\n"),
        says=(
            "Net.model() returned the class Linear, but a class holds no weights; return Linear(…), one of its objects."
        ),
    ),
    Mistake(
        name="`model()` returns a function",
        change=(_MODEL, "        return lambda x: x\n"),
        says=("Net.model() returned a function, but an nn.Module is trained; end it with return and the module."),
    ),
    Mistake(
        name="a model without parameters",
        change=(_MODEL, "        return nn.Flatten()\n"),
        says=(
            "Net.model() returned a Flatten without parameters, but there is nothing to train; assign its "
            "layers to self, or keep several in an nn.ModuleList, not in a plain list."
        ),
    ),
    Mistake(
        name="a model whose parameters are all frozen",
        change=(_MODEL, _MODEL.rstrip() + ".requires_grad_(False)\n"),
        says=(
            "Net.model() returned a model of 2 parameters, but none requires a gradient, so there "
            "is nothing to train; call requires_grad_(True) on those that are to be trained."
        ),
    ),
    Mistake(
        name="a lazy layer",
        change=(_MODEL, "        return nn.LazyLinear(3)\n"),
        says=(
            "Net.model() returned a model with the lazy parameter weight, but the optimizer and the other "
            "workers must know its size before the first batch; give that layer its number of inputs."
        ),
    ),
    Mistake(
        name="`train_data()` without `return`",
        change=(_TRAIN_DATA, "        pass\n"),
        says=(
            "Net.train_data() returned None, but batches are made of a data set; end it with return and the data set."
        ),
    ),
    Mistake(
        name="`TensorData` of different lengths",
        change=(_TRAIN_DATA, _TRAIN_DATA.replace("(3, (64,))", "(3, (63,))")),
        says=(
            "TensorData was given tensors of 64, 63 rows, but a sample is one row of each of them; give it tensors of "
            "one length."
        ),
    ),
    Mistake(
        name="`train_data()` returns a `DataLoader`",
        change=(
            _TRAIN_DATA,
            "        return torch.utils.data.DataLoader(TensorData(torch.randn(64, 8), torch.zeros(64)))\n",
        ),
        says=(
            "Net.train_data() returned a DataLoader, but batches are cut here, the same for any number of "
            "workers; return the data set itself."
        ),
    ),
    Mistake(
        name="`train_data()` returns `x, y`",
        change=(_TRAIN_DATA, "        return torch.randn(64, 8), torch.randint(3, (64,))\n"),
        says=(
            "Net.train_data() returned a tuple of 2 parts, but a data set gives one sample for each index; "
            "return stormo.data.TensorData(x, y) of tensors whose rows are the samples."
        ),
    ),
    Mistake(
        name="`train_data()` returns a generator",
        change=(_TRAIN_DATA, "        return ((torch.randn(8), 1) for _ in range(64))\n"),
        says=(
            "Net.train_data() returned a generator, which can be read once, but every epoch reads it again; "
            "return an object whose __iter__ starts from the beginning, or a list."
        ),
    ),
    Mistake(
        name="an empty validation set",
        change=(_VALIDATION_DATA, "        return []\n"),
        says=(
            "Net.validation_data() returned a data set without samples, but an epoch takes at least one; "
            "check how they are read."
        ),
    ),
    Mistake(
        name="batches without a tensor",
        change=(_TRAIN_DATA, '        return ["a sentence"] * 64\n'),
        flags=("--loader-workers", "0"),
        says=(
            "Net.train_data() gives batches of type list, but there is no tensor in them; return tensors or "
            "numbers from the data set."
        ),
    ),
    Mistake(
        name="a data set that cannot be pickled",
        change=(_TRAIN_DATA, "        return [(torch.randn(8), threading.Lock())] * 64\n"),
        good="import threading\n" + GOOD_TASK,
        flags=("--loader-workers", "1"),
        says=(
            "Net.train_data() returned a data set that cannot be sent to a loading process (cannot pickle "
            "'_thread.lock' object), but loading processes get it by pickle; set --loader-workers 0, or keep "
            "that out of it (functions and classes go to the top level of a file)."
        ),
    ),
    Mistake(
        name="a batch that cannot be moved to the device",
        change=("    def loss", "    def collate(self, samples):\n        return Graph()\n\n    def loss"),
        good="class Graph:\n    pass\n\n"
        + GOOD_TASK.replace(_TRAIN_DATA, "        return [(torch.ones(8), 1)] * 64\n"),
        flags=("--loader-workers", "0"),
        says=(
            "batch is of type Graph, but only tensors can be moved to cpu, also those in dicts, lists, tuples "
            "and dataclasses; give that type a method to(device), return tensors from the data set, or write "
            "collate() in the task."
        ),
    ),
    Mistake(
        name="a stream of unknown length",
        change=(_TRAIN_DATA, "        return Numbers()\n"),
        good="class Numbers:\n    def __iter__(self):\n        return iter(range(64))\n\n" + GOOD_TASK,
        says=(
            "train_data() gave a stream without a length, but an epoch, warm-up and decay need one; "
            "set --epoch-samples to the samples of an epoch, or give the "
            "stream a __len__."
        ),
    ),
    Mistake(
        name="`loss()` without `return`",
        change=_loss(_LOSS.replace("return ", "")),
        says=(
            "Net.loss() returned None, but the gradient is taken of a tensor; return the mean loss of the batch alone, "
            "or (loss, count)."
        ),
    ),
    Mistake(
        name="`loss()` returns a float",
        change=_loss(_LOSS.rstrip() + ".item()\n"),
        says=(
            "Net.loss() returned a float, but the gradient is taken of a tensor; return the loss itself, "
            "without .item() or float()."
        ),
    ),
    Mistake(
        name="one loss for each sample",
        change=_loss(_LOSS.replace("(model(x), y)", '(model(x), y, reduction="none")')),
        says=(
            "Net.loss() returned a tensor of shape [32], but the gradient is taken of one number; return its .mean()."
        ),
    ),
    Mistake(
        name="a count instead of a loss",
        change=_loss("        return (model(x).argmax(1) == y).sum()\n"),
        says=(
            "Net.loss() returned a tensor of type int64, but only floating-point numbers have a gradient; "
            "return the mean loss, not a count."
        ),
    ),
    Mistake(
        name="a loss without a gradient",
        change=_loss(_LOSS.rstrip() + ".detach()\n"),
        says=(
            "Net.loss() returned a tensor without a gradient, but it must lead back to the parameters of "
            "the model; compute it from what model(…) returns, without torch.no_grad(), .detach() or .item()."
        ),
    ),
    Mistake(
        name="`model.eval()` in `loss()`",
        change=("x, y = batch", "model.eval()\n        x, y = batch"),
        says=(
            "Net.loss() leaves the model in evaluation mode, but dropout and batch norm would not train from "
            "then on; leave model.eval() out of it: every micro-batch begins in the mode that it needs."
        ),
    ),
    Mistake(
        name="a parameter that `loss()` does not use",
        change=(_MODEL, "        return Two()\n"),
        good=_TWO_LAYERS,
        says=(
            "Net.model() has the parameters spare.weight, spare.bias, but Net.loss() gave them no gradient "
            "in the first batch; use them in loss(), leave them out, call requires_grad_(False) on them, or "
            "set find_unused = True on Net if other batches use them."
        ),
    ),
    Mistake(
        name="`metrics()` that returns no dict",
        change=(
            "    def loss",
            "    def metrics(self, model, batch):\n        return model(batch[0]).sum()\n\n    def loss",
        ),
        says=(
            "Net.metrics() returned a value of type Tensor, but each value is reported under its name; "
            'return a dict, such as {"loss": loss_sum}.'
        ),
    ),
    Mistake(
        name="a metric for each sample",
        change=(
            "    def loss",
            "    def metrics(self, model, batch):\n"
            '        return {"accuracy": model(batch[0]).argmax(1) == batch[1]}\n\n'
            "    def loss",
        ),
        says=(
            "Net.metrics() returned 'accuracy' as a tensor of shape [64], but the sum over the samples of a "
            "batch is one number; return its .sum()."
        ),
    ),
    Mistake(
        name="data in double precision",
        change=(_TRAIN_DATA, _TRAIN_DATA.replace("(64, 8)", "(64, 8, dtype=torch.float64)")),
        says=(
            "Net.loss() mixes tensors (my_task.py, line 19: mat1 and mat2 must have the same dtype, but got "
            "Double and Float), but the numbers of the batch and the weights must be of one type; let the "
            "data set give torch.float32 (.float()), and class numbers as torch.int64 (.long())."
        ),
    ),
    Mistake(
        name="data in single precision for fp64",
        change=(_TRAIN_DATA, _TRAIN_DATA.replace("(64, 8)", "(64, 8, dtype=torch.float32)")),
        flags=("--precision", "fp64"),
        says=(
            "Net.loss() mixes tensors (my_task.py, line 19: mat1 and mat2 must have the same dtype, but got "
            "Float and Double), but the numbers of the batch and the weights must be of one type; let the "
            "data set give torch.float64 (.double()) for --precision fp64, and class numbers as torch.int64 (.long())."
        ),
    ),
]

ON_TWO_WORKERS = [
    Mistake(
        name="unused parameters",
        change=(_MODEL, "        return Two()\n"),
        good=_TWO_LAYERS,
        num_workers=2,
        says=(
            "Net.model() has the parameters spare.weight, spare.bias, but Net.loss() gave them no gradient "
            "in the first batch; use them in loss(), leave them out, call requires_grad_(False) on them, or "
            "set find_unused = True on Net if other batches use them."
        ),
    ),
    Mistake(
        name="a part of the model called by `loss()`",
        change=(_MODEL, "        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))\n"),
        good=GOOD_TASK.replace("model(x)", "model[1](model[0](x))"),
        num_workers=2,
        says=(
            "Net.loss() does more with the model than to call it (my_task.py, line 19: "
            "'DistributedDataParallel' object is not subscriptable), but on several workers or GPUs it is "
            "wrapped in DDP or DataParallel, which exchanges gradients only when called; do that in the model's "
            "forward()."
        ),
    ),
    Mistake(
        name="fewer samples than workers",
        change=(_TRAIN_DATA, "        return TensorData(torch.ones(1, 8), torch.ones(1).long())\n"),
        num_workers=2,
        says=(
            "2 workers were asked for, but the training set has 1 sample, fewer than one for each; set "
            "--num-gpus for at most 1 worker."
        ),
    ),
]

# The headings of the page.
KINDS = {
    "Known before a worker starts": IN_THE_CLASS,
    "Known in the first batch, before the first step": IN_THE_FIRST_BATCH,
    "On several workers": ON_TWO_WORKERS,
}
MISTAKES = [mistake for mistakes in KINDS.values() for mistake in mistakes]
