"""Cache entries from elsewhere: host memory, disk, other engines. What the scheduler sees of them is in `base`."""
