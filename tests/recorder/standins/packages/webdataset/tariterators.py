base_plus_ext = url_opener = tar_file_expander = valid_sample = None
