"""The rounds of `chaos_job`: a child each, killed or not, and a look at what it left.

Knows when to kill and what to check; what the job is and what it may cost is said elsewhere.
"""

# The tests' own modules are found at run time.
# pyright: reportMissingImports=false

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import random
import shutil
import signal
import time

from chaos_case import COMMANDS, Case, Expected, RunKeys
from chaos_cost import Cost
from chaos_ledger import PHASES, Life
from failing_disk import HALVES, Moment
from nursery import Child, Nursery
from outside_reader import Violation, table
from tiny import write_tiny_llama

from jaxpaged.storage.local_store import Durability

INTERVALS = (0.0, 0.05, 1.0)
DURABILITIES: tuple[Durability, ...] = ("machine", "process")
ENGINES = (RunKeys(), RunKeys(max_num_seqs=3, block_size=4))
# With the longer one, a run generates for more than a second.
PAUSES = (0.0, 0.03)
WATCHED_SHARE = 0.3
LONGEST_SECONDS = {
    "starting": 0.2,
    "loading": 1.0,
    "generating": 0.02,
    "journaling": 0.001,
    "committing": 0.003,
    "finishing": 0.003,
}
CHILD_SECONDS = 300.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """What happened.

    Attributes:
        random_kills: Children killed at a random moment.
        step_kills: Children killed by their own disk.
        steps: Steps of the disk in a run.
        phases: Kills by where in its life the child was.
        commands: Commands that came to their end and were held against the uninterrupted job.
        looks: How often the outside reader read a folder.
        parts_adopted: Whole parts without a record that a later child committed.
        torn_logs: Logs of the journal that ended in a part of a frame after a kill.
    """

    random_kills: int = 0
    step_kills: int = 0
    steps: int = 0
    phases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    commands: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    looks: int = 0
    parts_adopted: int = 0
    torn_logs: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a child is killed, and what gives time for it; never, as it stands.

    Attributes:
        phase: Once it has written events of this phase into its ledger,
        event: so many of them, and
        seconds: so long after that.
        step: At this step of its disk, by itself.
        moment: When at the step.
        pause: Seconds that the child rests at each step of its engine.
    """

    phase: str | None = None
    event: int = 0
    seconds: float = 0.0
    pause: float = 0.0
    step: int = 0
    moment: Moment = "before"


class Chaos:
    """Runs jobs and kills them.

    Args:
        folder: Where everything lies.
        nursery: Starts the children.
        seed: Of what is left to chance.
        num_engines: How many sizes of engine the children have; each is compiled anew.

    Attributes:
        counts: What happened so far.
        cost: What it cost in tokens.
    """

    _case: Case

    def __init__(
        self, folder: pathlib.Path, nursery: Nursery, *, seed: int, num_engines: int
    ) -> None:
        self.counts = Counts()
        self.cost = Cost()
        self._folder = folder
        self._nursery = nursery
        self._engines = ENGINES[:num_engines]
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._model = write_tiny_llama(folder / "model", layers=1)
        self._expected: dict[str, Expected] = {}

    def measure(self) -> None:
        """Finds what the commands come to when nobody kills them; to be called first.

        Raises:
            Violation: It depends on run keys.
        """
        for keys in self._engines:
            case = self._new_case(is_measured=True)
            for command in COMMANDS:
                life = self._live(case, keys, Kill())[0]
                tokens = {row: finish.tokens for row, finish in life.finishes(0).items()}
                found = Expected(rows=table(case.out), tokens=tokens, phases=life.passed)
                known = self._expected.setdefault(command, found)
                if not known.rows.equals(found.rows):
                    raise Violation(f"{command}: {keys} changes the rows")
                case.next()
        self._case = self._new_case()

    def random_round(self) -> None:
        """Kills a child at a random moment; those that came to their end before do not count.

        Raises:
            Violation: Something is not as it must be.
        """
        while True:
            keys = dataclasses.replace(
                self._random.choice(self._engines),
                interval=self._random.choice(INTERVALS),
                durability=self._random.choice(DURABILITIES),
            )
            is_watched = self._random.random() < WATCHED_SHARE
            if self._round(keys, self._random_kill(), is_watched=is_watched) is not None:
                self.counts.random_kills += 1
                return
            self._go_on()

    def next_step(self) -> bool:
        """Kills three runs at the next numbered step of the disk: before it, within the bytes that
        it writes, and after it; False if a run has no such step.

        Raises:
            Violation: Something is not as it must be.
        """
        step = self.counts.steps + 1
        life = self._kill_at(step, "before")
        if life is None:
            return False
        self.counts.steps = step
        if life.last_step.startswith(HALVES):
            self._kill_at(step, "inside")
        self._kill_at(step, "after")
        return True

    def finish(self) -> None:
        """Lets the command at hand come to its end; what follows has a new job.

        Raises:
            Violation: Something is not as it must be.
        """
        self._round(RunKeys(), Kill())
        self._begin_anew()

    def figures(self) -> dict[str, object]:
        """All that was counted, by name."""
        counts = {
            field.name: getattr(self.counts, field.name)
            for field in dataclasses.fields(self.counts)
        }
        phases = {name: self.counts.phases[name] for name in PHASES}
        commands = {name: self.counts.commands[name] for name in COMMANDS}
        return {**counts, "phases": phases, "commands": commands, **dataclasses.asdict(self.cost)}

    def _new_case(self, *, is_measured: bool = False) -> Case:
        folder = self._folder / f"job-{next(self._numbers)}"
        return Case(folder, self._model, None if is_measured else self._expected)

    def _random_kill(self) -> Kill:
        phases = self._expected[self._case.command].phases
        phase = self._random.choice(PHASES)
        return Kill(
            phase=phase,
            event=self._random.randint(0, phases[phase]),
            seconds=self._random.uniform(0, LONGEST_SECONDS[phase]),
            pause=self._random.choice(PAUSES),
        )

    def _kill_at(self, step: int, moment: Moment) -> Life | None:
        """Kills a run at a step; None if runs have no such step."""
        while True:
            is_new = not self._case.out.exists()
            life = self._round(RunKeys(), Kill(step=step, moment=moment))
            if life is not None:
                self.counts.step_kills += 1
                return life
            self._begin_anew()
            if is_new:
                return None

    def _go_on(self) -> None:
        """The next command, of the job at hand or of a new one."""
        if not self._case.next():
            self._begin_anew()

    def _begin_anew(self) -> None:
        shutil.rmtree(self._case.out)
        self._case = self._new_case()

    def _round(self, keys: RunKeys, kill: Kill, *, is_watched: bool = False) -> Life | None:
        """One child; None if it came to its end."""
        case = self._case
        with case.reader.looking() if is_watched else contextlib.nullcontext():
            life, ended, was_killed = self._live(case, keys, kill)
        case.account.add(life, ended, case.interval(keys))
        case.reader.look()
        self.counts.looks += case.reader.take_looks()
        self.counts.parts_adopted += life.num_notes("was whole")
        if was_killed:
            self.counts.phases[life.phase] += 1
            self.counts.torn_logs += case.num_torn_logs()
            return life
        case.check_finished()
        self.cost.add(case.account.close())
        self.counts.commands[case.command] += 1
        return None

    def _live(self, case: Case, keys: RunKeys, kill: Kill) -> tuple[Life, float, bool]:
        """A child's life, when it ended, and whether by a kill."""
        ledger = self._folder / f"ledger-{next(self._numbers)}"
        how = {"at": kill.step, "moment": kill.moment, "pause": kill.pause}
        life = Life(ledger)
        child = self._nursery.start(case.order(keys) | how | {"ledger": str(ledger)})
        ended = _strike(child, life, kill)
        code = child.wait()
        if code not in (0, -signal.SIGKILL):
            raise Violation(f"{case.command}: a child ended with {code}; {self._folder}/log")
        life.read()
        ledger.unlink(missing_ok=True)
        return life, ended, code != 0


def _strike(child: Child, life: Life, kill: Kill) -> float:
    """Kills a child, or waits for its end; returns the moment."""
    if kill.phase is None:
        child.has_ended(CHILD_SECONDS)
        return time.monotonic()
    while life.passed[kill.phase] < kill.event and not child.has_ended(0.0005):
        life.read()
    child.has_ended(kill.seconds)
    ended = time.monotonic()
    child.kill()
    return ended
