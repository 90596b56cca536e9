"""Plan a step before it runs, and read it once it is compiled.

    strategy, loss, shapes --trace--> jaxpr --walk--> program of one device
    program --fusion, order, lifetimes--> memory; --collectives--> traffic; --> time

``tracing`` makes the jaxpr; ``walk``, ``control``, ``rules`` carry through it how each
value is split, and note collectives; ``demand`` and ``hoist`` do what the compiler does
backwards and out of loops. ``nodes``, ``schedule`` and ``liveness`` are what compilers
do with memory; ``compilers`` says which does what. ``formulas`` stands in where no loss
is given. ``explain`` reads a compiled program instead.
"""

from jfleet._planning.compare import Comparison as Comparison
from jfleet._planning.explain import Report as Report
from jfleet._planning.explain import explain as explain
from jfleet._planning.hardware import HARDWARE as HARDWARE
from jfleet._planning.hardware import Hardware as Hardware
from jfleet._planning.step_plan import StepPlan as StepPlan
from jfleet._planning.step_plan import plan_program as plan_program
from jfleet._planning.step_plan import plan_step as plan_step
