"""Stand-ins for parts of ``benchmarks/gpu``, and where it is."""

from pathlib import Path

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"
SLOW = """
import json, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[2])
out.write_text(json.dumps({"finished": False, "cells": {"first": {}}}))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
out.with_name("child").write_text(str(child.pid))
time.sleep(60)
"""
QUICK = """
import json, sys
from pathlib import Path
Path(sys.argv[2]).write_text(json.dumps({"finished": True, "line": "well", "cells": {}}))
"""
