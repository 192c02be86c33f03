"""The adapter's modules without SGLang: the tree, and custody over an engine that makes SGLang's moves."""
