# %% [markdown]
# # first_loop
#
# Text.

# %%
print(1)
