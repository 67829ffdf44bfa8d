import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Hadoop's local files without a process (chmod) for each one and without a second one for its checksum. */
public class LocalFiles extends LocalFileSystem {
    public LocalFiles() {
        super(new Unchecked());
        setWriteChecksum(false);
    }

    /** What Hadoop's native library does, which PySpark lacks. */
    public static class Unchecked extends RawLocalFileSystem {
        @Override
        public void setPermission(Path path, FsPermission permission) throws IOException {
            String letters = permission.toString().substring(0, 9);
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(letters));
        }
    }
}
