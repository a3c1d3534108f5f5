"""`python -m tests.engine.doomed_engine FOLDER STALL_AT`: an engine to be killed.

It emits one token a step and never returns from the step of output token number STALL_AT.
"""

import sys
import threading
from pathlib import Path

from engine.plan import Plan
from tests.engine.harness import Clock, running_engine, small_config
from tests.engine.scripted_runner import ScriptedRunner


class StallingRunner(ScriptedRunner):
    def __init__(self, stall_at: int) -> None:
        super().__init__()
        self._stall_at = stall_at

    def execute(self, plan: Plan) -> list[int]:
        if any(row.samples and row.output_index == self._stall_at for row in plan.rows):
            threading.Event().wait()
        return super().execute(plan)


def main(folder: Path, stall_at: int) -> None:
    with running_engine(StallingRunner(stall_at), small_config(), Clock(), folder):
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
