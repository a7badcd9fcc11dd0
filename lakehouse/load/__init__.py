"""The batch loader: files into the same bronze tables as the stream, each row once. Needs no JVM."""
