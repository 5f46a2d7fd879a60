"""Run while an image is built: a service starts, answers once, and stops, so that numba has compiled its kernels for this CPU.

    python compile_kernels.py orchestrator|predictor

The service reads its settings from the environment; NUMBA_CACHE_DIR says where the kernels go. Exit code 1 when it ends before it has
answered, 2 when it does not stop cleanly.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

COMPLETIONS = "http://127.0.0.1:8000/v1/completions"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 32}
ANSWER_SECONDS, STOP_SECONDS = 600.0, 60.0
LOADING = 503


def orchestrator_answers() -> bool:
    """Raises HTTPError for a refusal that will not go away."""
    request = urllib.request.Request(COMPLETIONS, json.dumps(PROMPT).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        if error.code != LOADING:
            raise
        return False
    except OSError:  # it does not listen yet
        return False


def predictor_answers() -> bool:
    return not subprocess.run([sys.executable, "-m", "ecospec_predictor.health"], capture_output=True).returncode


def compile_goodput() -> None:
    """A server chooses by goodput once it has measured costs, which are a machine's own; the kernels of the choice are not."""
    from ecospec_orchestrator.selection.calibration import Calibrator
    from ecospec_orchestrator.selection.goodput_kernel import warm_up

    Calibrator(1)
    warm_up()


def main(name: str) -> int:
    answers = {"orchestrator": orchestrator_answers, "predictor": predictor_answers}[name]
    if name == "orchestrator":
        compile_goodput()
    server = subprocess.Popen([f"ecospec-{name}", "serve"])
    try:
        while not answers():
            if server.poll() is not None:
                print(f"ecospec-{name} ended with {server.returncode} before it answered.", file=sys.stderr)
                return 1
            time.sleep(1)
        server.terminate()
        return 2 if server.wait(STOP_SECONDS) else 0
    finally:
        server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
