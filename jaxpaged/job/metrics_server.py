"""An HTTP endpoint that shows the metrics of one run as long as it runs."""

import contextlib
from collections.abc import Iterator

from jaxpaged.errors import ConfigError
from jaxpaged.job.metrics_progress import MetricsProgress


@contextlib.contextmanager
def serve(progress: MetricsProgress, *, host: str, port: int) -> Iterator[str]:
    """Serves the run's metrics inside a `with` statement; gives the URL.

    Args:
        progress: Knows how far the run is.
        host: The name or address to listen on.
        port: The port; 0 for one that is free.

    Raises:
        ConfigError: The package it takes is missing, or nothing can listen there.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "--metrics-port needs the package prometheus-client, which is not installed; install "
            "it: pip install 'jaxpaged[metrics]'"
        ) from error
    from jaxpaged.job.run_metrics import RunMetrics

    # Of its own: what the process-wide one holds is not this run's.
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunMetrics(progress))
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"--metrics-host {host} --metrics-port {port}: cannot listen there: {reason}; choose "
            "another port (0 takes one that is free), or an address of this machine"
        ) from error
    try:
        yield address(host, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def address(host: str, port: int) -> str:
    """The URL of the metrics; an address of IPv6 stands in brackets."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/metrics"
