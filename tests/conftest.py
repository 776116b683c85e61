"""Before any test imports JAX: eight CPU devices, so that multi-device code runs on any machine."""

from __future__ import annotations

import os

_EIGHT = "--xla_force_host_platform_device_count=8"

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()
