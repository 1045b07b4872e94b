"""Everything that looks at tensors: it runs probes, measures, and emits `Evidence`; no tensor leaves."""
