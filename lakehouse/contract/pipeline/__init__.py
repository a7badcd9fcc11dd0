"""The pipeline model: what ``conf/pipelines/NAME/pipeline.toml`` and users at run time declare, as frozen dataclasses.

Loading a pipeline starts no JVM and connects to nothing.

::

    folder         Pipeline, load_pipeline; View, Alert and Staging; PipelineFiles
    source         Source and its collectors, feeds, answers, enrichment and load shedding
    product        Product with the keys of every operator; ChannelSpec
    tenants        which rows a tenant sees
    expectations   what is expected of events, batches and tables
    added          queries and alerts that are declared at run time, and what SQL of that time may be
    demand         which events the subscribers of a lake want, told upstream
"""

from lakehouse.contract.pipeline.folder import Alert, Pipeline, Staging, View, load_pipeline
from lakehouse.contract.pipeline.product import OPERATORS, Product
from lakehouse.contract.pipeline.source import COLLECTOR_KINDS, CollectorSpec, Source, Template

__all__ = [
    "COLLECTOR_KINDS",
    "OPERATORS",
    "Alert",
    "CollectorSpec",
    "Pipeline",
    "Product",
    "Source",
    "Staging",
    "Template",
    "View",
    "load_pipeline",
]
