"""Fails where an installed wheel lacks kernels that its architecture should have.

Imports nothing but the extension, so that a wheel can be checked without what it depends on.
"""

import platform
import sys

from engine.kernels import load_native

VARIANTS = {"x86_64": ("scalar", "avx2", "avx512", "amx"), "aarch64": ("scalar", "neon")}

native = load_native()
compiled = native.compiled_variants()
missing = [name for name in VARIANTS[platform.machine()] if name not in compiled]
print(f"compiled: {', '.join(compiled)}; usable here: {', '.join(native.variants())}")
sys.exit(f"kernels are missing: {', '.join(missing)}" if missing else 0)
