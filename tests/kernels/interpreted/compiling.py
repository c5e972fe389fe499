"""Compiles Triton kernels for a GPU that need not be there, in a process of its own without the interpreter.

Used as `compiled = compile_kernel("saccade.kernels.topk.triton", "_select", ...)`; the child imports the module anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel: its PTX, and what ptxas says of one thread."""

    ptx: str
    registers: int
    spilled: int


def compile_kernel(
    module: str,
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: tuple[str, ...],
    *,
    capability: int,
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compile `module.kernel` for `sm_<capability>`.

    Args:
        signature: Triton's type of every parameter that is no constant, such as "*bf16", "*i32", "i32", "fp32".
        constants: values of the `tl.constexpr` parameters.
        divisible: parameters known to be multiples of 16, as pointers of whole tensors and most strides are.
    """
    job = {
        "module": module,
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "divisible": list(divisible),
        "capability": capability,
        "warps": warps,
        "stages": stages,
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job["module"]), job["kernel"])
    names = list(function.arg_names)
    types = {name: job["signature"].get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]}
    source = ASTSource(
        function, types, {(names.index(name),): job["constants"][name] for name in job["constants"]}, attributes
    )
    target = GPUTarget("cuda", job["capability"], 32)
    built = triton.compile(source, target=target, options={"num_warps": job["warps"], "num_stages": job["stages"]})
    ptx = built.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        architecture = re.search(r"\.target (\S+?)(?:,|\s)", ptx)
        assert architecture is not None
        said = subprocess.run(
            [str(ptxas), "-v", f"-arch={architecture[1]}", "-o", str(file.with_suffix(".cubin")), str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers is not None, said
    return {"ptx": ptx, "registers": int(registers[1]), "spilled": sum(map(int, spilled))}


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.stdin.read()))))  # noqa: T201
