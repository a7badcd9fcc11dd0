"""What every part of Millrace agrees on: envelope, table names, pipeline model, settings, errors.

Pure Python: importing it starts no JVM and needs neither pyspark nor deltalake.
"""
