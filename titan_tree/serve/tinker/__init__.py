"""tinker: the API of the package ``tinker``, so that its clients train and sample here. See docs/tinker.md.

    protobuf or JSON -> wire -> Pass, Sample -> TinkerAPI (sessions, order, futures) -> Engine -> wire

wire.py  messages of the client's package from and to arrays
jobs.py  JobQueue: the thread in which the engine runs, and the results of requests
api.py   TinkerAPI: addresses, sessions, models, the order of requests; Engine

The engine is titan_tree.rl.tinker. No module here computes with torch.
"""
