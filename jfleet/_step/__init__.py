"""The parts of a training step: local region, boundary, global region.

    batch --window gradients--> (per replica) --reduce--> --update--> new state

``setup`` says what a strategy needs of a step; ``layout`` where every array lives;
``loss`` gives the gradient of a window of micro batches; ``local`` and ``reduce`` run
it per replica; ``update`` applies it.
"""
