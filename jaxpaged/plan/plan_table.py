"""A plan on the terminal."""

from collections.abc import Iterator

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.engine.shortage import size
from jaxpaged.job.progress import duration
from jaxpaged.plan.job_plan import JobPlan, Target
from jaxpaged.plan.rehearsal import Rehearsal
from jaxpaged.plan.survey import Lens

_BAR = 30


def show(plan: JobPlan, console: rich.console.Console) -> None:
    """Prints rows, memory, the schedule, and what to change."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_rows(plan), *_memory(plan)):
        table.add_row(rich.text.Text(name), rich.text.Text(value))
    console.print(table)
    if plan.paged is not None:
        console.print(_schedules(plan, plan.paged))
    if plan.seconds is not None:
        fastest, slowest = plan.seconds
        console.print(
            f"time: {duration(fastest)} to {duration(slowest)}, without loading and compiling"
        )
    if plan.shortage is not None:
        console.print(f"does not fit: {plan.shortage}", style="red", markup=False, soft_wrap=True)
    if plan.changes:
        console.print(_changes(plan))
    for note in plan.notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)


def _dtypes(target: Target) -> str:
    if target.weight_dtype == target.dtype:
        return target.dtype
    return f"{target.dtype} with linear maps in {target.weight_dtype}"


def _rows(plan: JobPlan) -> Iterator[tuple[str, str]]:
    survey = plan.survey
    yield (
        "device",
        f"{plan.target.device}, {_dtypes(plan.target)}, attention by {plan.target.implementation}",
    )
    looked = "" if survey.rows == plan.total_rows else f", {survey.rows:,} of them looked at"
    yield "rows", f"{plan.total_rows:,}{looked}"
    yield from _lens("prompt tokens", survey.prompt_lens)
    yield from _lens("new tokens, at most", survey.new_lens)
    for code, count in survey.fault_counts.items():
        places = "; ".join(survey.faults.get(code, []))
        yield f"row error {code}", f"{count:,}" + (f", first: {places}" if places else "")
    for code, count in survey.skipped.items():
        yield f"skipped {code}", f"{count:,}"
    if survey.too_long:
        yield "too long", f"{survey.too_long:,} rows leave no room for a new token; on_too_long:"
        for policy, effect in survey.effects.items():
            yield f"  {policy}", _effect(policy, effect.rows, effect.tokens_cut)
    total = survey.prompt_lens.total
    if total:
        shared = f"{survey.shared_tokens:,} prompt tokens ({survey.shared_tokens / total:.1%})"
        yield "repetition", f"{survey.duplicates:,} prompts that an earlier row has, too"
        yield "", f"{shared} in whole blocks that an earlier prompt begins with"
    if survey.special_texts:
        yield "special text", f"{survey.special_texts:,} rows have text like a special token's"
    if survey.answered:
        yield (
            "final answers",
            f"{survey.answered:,} chats end in a finished message of the assistant",
        )


def _effect(policy: str, rows: int, tokens_cut: int) -> str:
    if policy == "error":
        return f"{rows:,} row errors"
    if policy == "skip":
        return f"{rows:,} rows skipped"
    return f"{rows:,} rows cut, {tokens_cut:,} tokens in all"


def _lens(name: str, lens: Lens) -> Iterator[tuple[str, str]]:
    if not len(lens):
        return
    quantiles = ", ".join(f"{key} {value:,}" for key, value in lens.quantiles().items())
    yield name, f"{lens.total:,}; {quantiles}"
    bins = lens.histogram()
    most = max(count for *_, count in bins)
    for first, last, count in bins:
        bar = "█" * max(1, round(_BAR * count / most))
        yield "", f"{first:>7,} to {last:<7,} {bar} {count:,}"


def _memory(plan: JobPlan) -> Iterator[tuple[str, str]]:
    memory, capacity = plan.memory, plan.capacity
    if memory is None or capacity is None:
        return
    yield "weights", size(memory.weights_bytes)
    blocks = f"{capacity.num_blocks:,} blocks x {capacity.block_size} = {capacity.num_tokens:,}"
    each = f"{capacity.bytes_per_token:,} bytes in {plan.target.kv_dtype}"
    yield "KV pool", f"{size(capacity.num_bytes)}: {blocks} tokens of {each}"
    if memory.touched_bytes is not None:
        yield "  written to", f"{size(memory.touched_bytes)} by this job's rows"
    temporary = memory.temporary
    source = "the compiler's figures" if temporary.by_compiler else "by a formula"
    parts = f"forward pass {size(temporary.forward_bytes)}, sampler {size(temporary.sampler_bytes)}"
    yield "temporary", f"{size(temporary.num_bytes)} ({source}: {parts})"
    yield "together", f"{size(memory.needed_bytes)} of {size(memory.available_bytes)} available"
    if memory.process_bytes:
        process = f"{size(memory.process_bytes)} of it Python, JAX and the model's tokenizer"
        yield "process at its peak", f"{size(memory.peak_bytes)}, {process}"
    target = plan.target
    lanes = f"engine.max_num_seqs is {target.max_num_seqs:,}"
    held = capacity.concurrent(target.max_model_len)
    static = f"{held:,} with {target.max_model_len:,} tokens reserved for each; {lanes}"
    if plan.paged is not None and plan.paged.mean_blocks:
        on_demand = int(capacity.num_blocks / plan.paged.mean_blocks)
        yield (
            "room in the pool for",
            f"about {on_demand:,} of these rows at once with blocks on demand",
        )
        yield "", static
    else:
        yield "room in the pool for", static


def _schedules(plan: JobPlan, paged: Rehearsal) -> rich.table.Table:
    """What the scheduler would do, with blocks on demand and with static reservation."""
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    table.add_column("the scheduler, rehearsed", no_wrap=True)
    table.add_column("blocks on demand", justify="right")
    table.add_column(f"{plan.target.max_model_len:,} tokens reserved for each", justify="right")
    both = [_figures(run, plan.scale) for run in (paged, plan.static) if run is not None]
    for name in both[0]:
        cells = [figures[name] for figures in both]
        table.add_row(name, *cells, *["does not fit"] * (2 - len(cells)))
    return table


def _figures(run: Rehearsal, scale: float) -> dict[str, str]:
    about = "" if scale == 1 else "about "
    return {
        "steps": f"{about}{round(run.steps * scale):,}",
        "preemptions": f"{about}{round(run.preemptions * scale):,}",
        "sequences at once, mean and most": f"{run.mean_running:.1f}, {run.peak_running:,}",
        "blocks in use, most": f"{run.peak_used_blocks:,}",
        "KV memory held and not used": waste(run.kv_waste_share),
        "prompt tokens from the prefix cache": f"{about}{round(run.cached_tokens * scale):,}",
        "tokens computed": f"{about}{round(run.computed_tokens * scale):,}",
        "padding": f"{run.padding_share:.1%}",
        "programs to compile": f"{run.executables}, steps of "
        + ", ".join(f"{tokens:,}" for tokens in run.token_buckets)
        + " tokens",
    }


def waste(share: float) -> str:
    """The share of slots without a token; where blocks are shared, a slot counts more than one."""
    return f"{share:.1%}" if share >= 0 else f"none, {1 - share:.2f} tokens a slot"


def _changes(plan: JobPlan) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    table.add_column("what would help, the cheapest first, each alone", no_wrap=True)
    for title in ("blocks", "tokens", "of the longest row at once"):
        table.add_column(title, justify="right")
    for change in plan.changes:
        table.add_row(
            rich.text.Text(change.text),
            f"{change.num_blocks:,}",
            f"{change.num_tokens:,}",
            f"{change.concurrent:,}",
        )
    return table
