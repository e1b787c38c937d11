def write_page(*a, **k): raise NotImplementedError
