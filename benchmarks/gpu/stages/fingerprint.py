"""What is under test: driver, clocks, ECC, MIG, and whether the driver scrubs what is freed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from harness import hardware

from gpu.report import Reason, Report

ASKED = (
    "name", "uuid", "driver_version", "vbios_version", "memory.total", "ecc.mode.current", "mig.mode.current",
    "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "clocks_throttle_reasons.active",
    "power.limit", "temperature.gpu", "compute_mode", "persistence_mode",
)  # fmt: skip
PARAMETERS = Path("/proc/driver/nvidia/params")
SCRUB_KEYS = ("RmDisableScrubOnFree", "RMDisableScrubOnFree")


def run(report: Report, lab: Any) -> None:
    """Facts; nothing is judged but that there are some."""
    facts = hardware.facts("kvcustody", "torch", "triton", "numpy")
    report.check("versions", bool(facts["versions"]["torch"]), **facts["versions"], commit=facts["commit"])
    if lab.rehearsal:
        for name in ("the device", "nvidia-smi", "scrub on free"):
            report.skip(name, Reason.REHEARSAL)
        return
    device = torch.cuda.get_device_properties(0)
    report.measured(
        "the device",
        model=device.name,
        capability=f"{device.major}.{device.minor}",
        multiprocessors=device.multi_processor_count,
        memory_bytes=device.total_memory,
        l2_bytes=getattr(device, "L2_cache_size", 0),
        runtime=torch.version.hip or torch.version.cuda,
    )
    smi(report)
    parameters(report)


def smi(report: Report) -> None:
    """nvidia-smi's words, each as it answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        report.skip("nvidia-smi", Reason.TOOL_MISSING)
        return
    answers = {}
    for one in ASKED:  # one by one: an unknown field refuses the whole query
        done = subprocess.run(
            [tool, "--id=0", f"--query-gpu={one}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
        answers[one] = done.stdout.strip() if done.returncode == 0 else "not answered"
    if set(answers.values()) == {"not answered"}:
        report.skip("nvidia-smi", Reason.TOOL_REFUSED, "it answers nothing")
        return
    report.measured("nvidia-smi", **answers)


def parameters(report: Report) -> None:
    """Whether the driver was told not to scrub what is freed; what it does is measured by `residue`."""
    try:
        text = PARAMETERS.read_text()
    except OSError as error:
        report.skip("scrub on free", Reason.TOOL_MISSING, f"`{PARAMETERS}`: {error.strerror}")
        return
    told = [line.strip() for line in text.splitlines() if any(key in line for key in SCRUB_KEYS)]
    registry = [line.strip() for line in text.splitlines() if line.startswith("RegistryDwords")]
    report.measured("scrub on free", named=bool(told), parameters="; ".join(told or registry) or "default")
