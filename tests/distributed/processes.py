"""Functions that several processes call at once, as under torchrun, but forked from one that has imported PyTorch."""

import multiprocessing
import os
import socket
import time
import traceback
from pathlib import Path

from sigattn.ops import llvm

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("tests.distributed.worker", "tests.distributed.context_worker", "sigattn.ops.triton.launch",
             "sklearn.datasets", "torch._dynamo", "torch.distributed.checkpoint.hf_storage",
             "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
             "torch.utils.tensorboard")  # fmt: skip
CONTEXT.set_forkserver_preload(list(PRELOADED))
TIMEOUT = 300  # seconds


def launch(count, folder, function, *arguments):
    """Call a function in ``count`` processes of one group.

    Returns:
        What each process wrote to its standard error, and the exit codes.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    files = [Path(folder) / f"{count}-{rank}.txt" for rank in range(count)]
    processes = [
        CONTEXT.Process(target=_call, args=(rank, count, port, str(files[rank]), function, *arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()
        process.join()
    return [file.read_text() for file in files], [process.exitcode for process in processes]


def _call(rank, count, port, file, function, *arguments):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    llvm.machine_unavailable = lambda: "it would be compiled in each process"
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # PyTorch's own threads sometimes abort a process that ends in order (docs/log.md)
