"""The block manager, which an engine calls for each request; how it makes room, how it is checked and repaired."""
