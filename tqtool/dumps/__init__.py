"""Reading dumps: files of arrays, what their names and shapes say, and the tensors in them."""
