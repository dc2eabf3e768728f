"""Builds the CPU image without a container engine and tries it: ``python -m deploy.image``.

The steps of the Dockerfile are carried out in a Debian root that mmdebstrap makes. The result runs
as a container would: as its own user without capabilities, the root read-only, nothing but the
cache volume to write to, its HEALTHCHECK command asked. Needs root, mmdebstrap and overlay mounts.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from deploy.image.build import Builder
from deploy.image.dockerfile import DockerfileError
from deploy.image.trial import Trial, TrialError

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.image", description=__doc__)
    parser.add_argument("--target", default="cpu", help="the stage to build")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "image", metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="the layers, to look at them")
    arguments = parser.parse_args()
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True)

    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        image = Builder(ROOT, work, tell).build(arguments.target)
        Trial(image, work, tell).run()
    except (DockerfileError, TrialError) as error:
        print(f"deploy.image: error: {error}", file=sys.stderr)
        return 1
    finally:
        if not arguments.keep:
            for name in ("layers", "volume"):
                shutil.rmtree(work / name, ignore_errors=True)
    return 0


sys.exit(main())
