"""Devices as plain values, for tests of decisions."""

from safe_trainers.core.device import Device


CPU = Device("cpu", "CPU")


HALVES = frozenset({"bfloat16", "float16"})


MPS = Device("mps", "MPS", unscalable_dtypes=HALVES)


T4 = Device("cuda", "Tesla T4", (7, 5), unscalable_dtypes=HALVES)


V100 = Device("cuda", "V100", (7, 0), unscalable_dtypes=HALVES)


A100 = Device("cuda", "A100", (8, 0), unscalable_dtypes=HALVES)


H200 = Device("cuda", "H200", (9, 0), unscalable_dtypes=HALVES)


MI300 = Device("cuda", "MI300X", (9, 4), rocm=True, unscalable_dtypes=HALVES)


OLD_AMD = Device("cuda", "gfx90a", (7, 0), rocm=True, unscalable_dtypes=HALVES)


FUTURE = Device("cuda", "A100", (8, 0), unscalable_dtypes=frozenset({"float16"}))
