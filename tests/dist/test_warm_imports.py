"""What a process imports before it is given a GPU does not look at one: it would go on to see them all."""

from __future__ import annotations

import os
import subprocess
import sys

from ray_ckpt.warm import WARM_VARIABLE

# Every way of torch to the driver of a GPU, closed; and afterwards all that a worker needs is there.
LOOK = """
import sys
import torch

def looked(*args, **kwargs):
    raise SystemExit("an import looks at the GPUs")

for name in ("is_available", "device_count", "_lazy_init", "init", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, looked)
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, looked)

from ray_ckpt import warm

warm.warm_up()
missing = [name for name in warm.IMPORTS if name not in sys.modules]
assert not missing, missing
before = set(sys.modules)
import ray_ckpt.session, ray_ckpt.resume, torch.distributed.fsdp, pandas
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
more = {name.partition(".")[0] for name in set(sys.modules) - before}
print("MORE", sorted(more))
"""


def test_nothing_that_is_imported_ahead_looks_at_a_gpu_and_nothing_is_left_for_later() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, WARM_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not import" not in done.stderr
    assert done.stdout.strip() == "MORE []", "a worker imports more than this, in its restart"


THREADS = """
import os, sys
from ray_ckpt import warm

warm.warm_up()
os.environ["OMP_NUM_THREADS"] = "{threads}"
import torch

warm.settle()
print(torch.get_num_threads())
"""


def threads_of(granted: str, *, warm: str) -> int:
    """Threads of torch in a new process, when Ray grants it so many after it was warmed up, or not."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(threads=granted)],
        env={**env, WARM_VARIABLE: warm},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


def test_a_warm_process_has_as_many_threads_as_a_fresh_one() -> None:
    # One is what a worker with one processor has; the other is more than there are cores.
    assert threads_of("1", warm="1") == threads_of("1", warm="0") == 1
    many = str(1 + (os.cpu_count() or 1))
    assert threads_of(many, warm="1") == threads_of(many, warm="0")
