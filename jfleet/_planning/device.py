"""From a traced step to the program of one device."""

from jfleet._planning import control as control  # registers the handlers
from jfleet._planning.compilers import Compiler
from jfleet._planning.demand import demands
from jfleet._planning.hoist import hoisted
from jfleet._planning.program import Program
from jfleet._planning.tiles import Tile
from jfleet._planning.tracing import TracedStep, argument_dims
from jfleet._planning.walk import Walker
from jfleet._planning.widen import widened


def device_program(
    traced: TracedStep, compiler: Compiler
) -> tuple[Program, tuple[str, ...]]:
    """What one device runs, and what could not be followed."""
    first = _walked(traced, {})
    hints = demands(first.program)
    walker = _walked(traced, hints) if hints else first
    program = hoisted(walker.program)
    program = widened(program) if compiler.widens_bfloat16 else program
    return program, tuple(dict.fromkeys(walker.notes))


def _walked(traced: TracedStep, hints: dict) -> Walker:
    walker = Walker(sizes=traced.sizes, hints=hints)
    tiles: list[Tile] = []
    for argument in traced.arguments:
        if argument.used:
            dims = argument_dims(argument)
            tiles.append(
                walker.tile(argument.shape, argument.dtype, dims, argument.kind)
            )
    walker.program.inputs = [t.id for t in tiles]
    outs = walker.run(traced.jaxpr, tiles)
    walker.program.outputs = [t.id for t in outs]
    return walker
