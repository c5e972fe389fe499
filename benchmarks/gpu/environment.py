"""Where a measurement was taken: device, versions, and what its memory can do."""

import importlib
import platform
from datetime import datetime, timezone
from typing import Any

import torch

from .timing import arguments, bandwidth, reason, write


def main() -> None:
    given = arguments(__doc__, 30).parse_args()
    write(given.file, environment(given.smoke))


def environment(smoke: bool) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("torch", "triton", "transformers", "flashinfer", "flash_attn_interface")
        },
        "cuda": torch.version.cuda,
        "smoke": smoke,
        **bandwidth(device, 16 if smoke else 4096),
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found |= {"processors": facts.multi_processor_count, "memory_gb": round(facts.total_memory / 1e9, 1)}
        found["l2_mb"] = round(facts.L2_cache_size / 2**20, 1)
    return found


def version(name: str) -> str:
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:  # an installed package that cannot be loaded is as good as none
        return reason(error)


if __name__ == "__main__":
    main()
