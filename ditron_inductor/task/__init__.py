"""The Task level says what one fused node of the graph is, what it costs, and by which strategy it runs.

* `nodes`: one frozen dataclass per node kind, with `verify()` and one stable text form
* `ops`: the `torch.library` op of each kind, its schema and its fake implementation
* `reference`: the same computations in plain collectives, which is also the strategy `library`
* `plan`: which strategy runs a node, as a pure function of facts that all ranks share
* `table`, `results`: measured times, as the plan reads them and as benchmarks write them
* `cost`, `model_error`: predicted times, and how far they are from measured ones
* `verify`: the legality of a whole rewritten graph
"""
