"""C++ templates: the text of kernels that Inductor compiles."""
