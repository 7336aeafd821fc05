"""Task level: what one fused node of the graph is, costs, and by which strategy it runs.

* `nodes`: one frozen dataclass per node kind, with `verify()` and one stable text form
* `ops`: the `torch.library` op of each kind, its schema and its fake implementation
* `reference`: the same computations in plain collectives, which is also the strategy `library`
* `cost`, `plan`: which strategy runs a node, as a pure function of facts that all ranks share
* `verify`: the legality of a whole rewritten graph
"""
