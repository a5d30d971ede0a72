/*
 * A STAND-IN for NVIDIA pyxis, for tests only: there is no container here.
 *
 * - Registers the option names of the real pyxis with srun, sbatch and salloc, so that --container-* is parsed, checked
 *   and carried to the node by real Slurm.
 * - Runs the task on the host, and puts what was asked for into its environment: --container-image=X becomes
 *   FAKE_PYXIS_IMAGE=X, --no-container-mount-home becomes FAKE_PYXIS_NO_MOUNT_HOME=1, and so on.
 * - As the real one: without an image and without a name the other options are ignored, loudly; the task starts in
 *   --container-workdir (here only if that directory exists on the host).
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1)

enum { IMAGE, NAME, WORKDIR }; /* rows that mean something here; the rest is only reported */

static int accept_option(int row, const char *value, int remote);

static struct spank_option options[] = {
	{"container-image", "IMAGE", "[fake pyxis] the image to use", 1, IMAGE, accept_option},
	{"container-name", "NAME", "[fake pyxis] name of the container", 1, NAME, accept_option},
	{"container-workdir", "PATH", "[fake pyxis] working directory in the container", 1, WORKDIR, accept_option},
	{"container-mounts", "SRC:DST[:FLAGS],...", "[fake pyxis] bind mounts", 1, 3, accept_option},
	{"container-env", "NAME[,NAME...]", "[fake pyxis] variables that override the image's", 1, 4, accept_option},
	{"container-save", "PATH", "[fake pyxis] save the container to this file", 1, 5, accept_option},
	{"container-mount-home", NULL, "[fake pyxis] bind mount the home directory", 0, 6, accept_option},
	{"no-container-mount-home", NULL, "[fake pyxis] do not bind mount the home directory", 0, 7, accept_option},
	{"container-remap-root", NULL, "[fake pyxis] be root in the container", 0, 8, accept_option},
	{"no-container-remap-root", NULL, "[fake pyxis] do not be root in the container", 0, 9, accept_option},
	{"container-entrypoint", NULL, "[fake pyxis] execute the image's entrypoint", 0, 10, accept_option},
	{"no-container-entrypoint", NULL, "[fake pyxis] do not execute the image's entrypoint", 0, 11, accept_option},
	{"container-writable", NULL, "[fake pyxis] a writable root filesystem", 0, 12, accept_option},
	{"container-readonly", NULL, "[fake pyxis] a read-only root filesystem", 0, 13, accept_option},
};
#define ROWS ((int)(sizeof(options) / sizeof(options[0])))

static char *asked[ROWS]; /* the value, "1" for a flag, NULL when not asked for */

static int accept_option(int row, const char *value, int remote)
{
	(void)remote;
	if (options[row].has_arg && (value == NULL || value[0] == '\0')) {
		slurm_error("pyxis: --%s: argument required", options[row].name);
		return -1;
	}
	free(asked[row]);
	asked[row] = strdup(options[row].has_arg ? value : "1");
	return asked[row] == NULL ? -1 : 0;
}

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	(void)argc, (void)argv;
	for (int row = 0; row < ROWS; row++)
		if (spank_option_register(sp, &options[row]) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

/* no-container-mount-home -> FAKE_PYXIS_NO_MOUNT_HOME */
static void variable(const char *option, char *name, size_t size)
{
	int negated = strncmp(option, "no-", 3) == 0;
	const char *rest = option + (negated ? 3 : 0) + strlen("container-");
	snprintf(name, size, "FAKE_PYXIS_%s%s", negated ? "NO_" : "", rest);
	for (char *c = name; *c; c++)
		*c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
}

int slurm_spank_task_init(spank_t sp, int argc, char **argv)
{
	(void)argc, (void)argv;
	char name[64];
	for (int row = 0; row < ROWS; row++) {
		variable(options[row].name, name, sizeof(name));
		spank_unsetenv(sp, name); /* a step's report is its own, not what the batch script was told */
		if (asked[row] == NULL)
			continue;
		if (asked[IMAGE] == NULL && asked[NAME] == NULL) {
			slurm_error("pyxis: ignoring --%s because neither --container-image nor --container-name is set", options[row].name);
			continue;
		}
		if (spank_setenv(sp, name, asked[row], 1) != ESPANK_SUCCESS)
			return -1;
		if (row == WORKDIR && access(asked[row], F_OK) == 0 && chdir(asked[row]) != 0) {
			slurm_error("pyxis: couldn't chdir to %s: %m", asked[row]);
			return -1;
		}
	}
	return 0;
}
