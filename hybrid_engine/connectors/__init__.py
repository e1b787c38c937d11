"""KV and states from elsewhere: host memory, a folder on disk, another process. See docs/CONNECTORS.md."""
