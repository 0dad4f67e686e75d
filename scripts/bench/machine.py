"""What a figure has to be read with: the machine, and what else it was doing."""

import os
import platform

WANTED = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")


def facts():
    name, flags = platform.processor() or "unknown", []
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = value.split()
                break
    return {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in WANTED if flag in flags],
        "load_before": round(os.getloadavg()[0], 1),
    }
