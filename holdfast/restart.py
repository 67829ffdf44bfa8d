"""When `holdfast.run` restarts a query after a failure: Flink's restart strategies.

::

    import holdfast
    from holdfast import restart

    holdfast.run(start, restart=restart.exponential(first_s=1, longest_s=60))
"""

from __future__ import annotations

from holdfast.spark_integration.restarting import Restart, RestartStrategy, exponential, failure_rate, fixed_delay

__all__ = ["Restart", "RestartStrategy", "exponential", "failure_rate", "fixed_delay"]
