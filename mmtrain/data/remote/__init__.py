"""Files elsewhere (`https://`, `s3://`, ...): read in ranges through `fsspec`, and kept in a bounded cache on disk.

Read `locations.open_location` first, which opens a path of this machine or a URL. `remote_files` asks the server, with
retries, and checks what it answers; `block_cache` keeps pieces of files for all processes of a machine.
"""
